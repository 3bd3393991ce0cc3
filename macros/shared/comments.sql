{#-
    `persist_docs`: descriptions of a model and its columns as comments of its table or view. dbt-spark alters every
    column at every run, a Delta commit for each; here a comment that is there is left alone, and all that differ are
    set in one commit.
-#}

{% macro persist_comments(relation) %}
    {%- if config.persist_relation_docs() or config.persist_column_docs() -%}
        {%- set stored = lakehouse_patterns.stored_comments(relation) -%}
        {%- if config.persist_column_docs() and model.columns -%}
            {%- do lakehouse_patterns.persist_column_comments(relation, stored.columns) -%}
        {%- endif -%}
        {%- if config.persist_relation_docs() and model.description and model.description != stored.relation -%}
            {%- do run_query(
                'comment on table ' ~ relation ~ ' is ' ~ lakehouse_patterns.text_literal(model.description)
            ) -%}
        {%- endif -%}
    {%- endif -%}
{% endmacro %}


{% macro persist_column_comments(relation, stored) %}
    {%- set documented = validate_doc_columns(relation, model.columns, stored | list) -%}
    {%- set changes = [] -%}
    {%- for name, column in documented.items() -%}
        {%- set known = lakehouse_patterns.column_name(stored, name) -%}
        {%- if column.description and column.description != stored[known] -%}
            {%- do changes.append(
                lakehouse_patterns.quoted_name(known) ~ ' comment '
                ~ lakehouse_patterns.text_literal(column.description)
            ) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- if changes -%}
        {%- do run_query('alter table ' ~ relation ~ ' alter column ' ~ (changes | join(', '))) -%}
    {%- endif -%}
{% endmacro %}


{% macro stored_comments(relation) %}
    {#- {columns: {name: comment or none}, relation: its comment or none} -#}
    {%- set found = {'columns': {}, 'relation': none} -%}
    {%- set is_column = [true] -%}
    {%- for name, type, comment in run_query('describe extended ' ~ relation).rows -%}
        {%- if not name or name.startswith('#') -%}
            {%- do is_column.clear() -%}
        {%- elif is_column -%}
            {%- do found.columns.update({name: comment}) -%}
        {%- elif name == 'Comment' -%}
            {%- do found.update({'relation': type}) -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(found) }}
{% endmacro %}


{% macro view_comments(node, names) %}
    {#- The column list and the comment of a view, between its name and its properties; empty without persist_docs. -#}
    {%- set persisted, columns, parts = node.config.persist_docs or {}, [], [] -%}
    {%- for name in names -%}
        {%- set documented = lakehouse_patterns.column_name(node.columns, name) -%}
        {%- set description = node.columns[documented].description if documented is not none else '' -%}
        {%- do columns.append(
            lakehouse_patterns.quoted_name(name)
            ~ (' comment ' ~ lakehouse_patterns.text_literal(description) if description else '')
        ) -%}
    {%- endfor -%}
    {%- if persisted.columns and node.columns and columns -%}
        {%- do parts.append('(' ~ (columns | join(', ')) ~ ')') -%}
    {%- endif -%}
    {%- if persisted.relation and node.description -%}
        {%- do parts.append('comment ' ~ lakehouse_patterns.text_literal(node.description)) -%}
    {%- endif -%}
    {{ return(parts | join('\n')) }}
{% endmacro %}


{% macro view_comments_differ(node, view) %}
    {#- Whether the view must be made again to have the descriptions that persist_docs asks for. -#}
    {%- set persisted = node.config.persist_docs or {} -%}
    {%- if not (persisted.columns or persisted.relation) -%}
        {{ return(false) }}
    {%- endif -%}
    {%- set stored = lakehouse_patterns.stored_comments(view) -%}
    {%- if persisted.relation and node.description and node.description != stored.relation -%}
        {{ return(true) }}
    {%- endif -%}
    {%- for name, comment in stored.columns.items() if persisted.columns -%}
        {%- set documented = lakehouse_patterns.column_name(node.columns, name) -%}
        {%- if documented is not none and node.columns[documented].description
            and node.columns[documented].description != comment -%}
            {{ return(true) }}
        {%- endif -%}
    {%- endfor -%}
    {{ return(false) }}
{% endmacro %}
