{#-
    Constraints of an enforced contract. dbt-spark sets `not null` on a column, which Delta refuses for one that is
    nullable, as those of a query are: here it is a check constraint, which Delta enforces as well. Missing
    constraints are added, so that a run repairs a table whose earlier run died.
-#}

{% macro persist_table_constraints(relation) %}
    {%- set wanted = lakehouse_patterns.contract_checks() -%}
    {%- if wanted -%}
        {%- set stored = lakehouse_patterns.table_properties(relation) -%}
        {%- for name, expression in wanted.items() if 'delta.constraints.' ~ name | lower not in stored -%}
            {%- do run_query(
                'alter table ' ~ relation ~ ' add constraint ' ~ lakehouse_patterns.quoted_name(name) ~ ' check ('
                ~ expression ~ ')'
            ) -%}
        {%- endfor -%}
    {%- endif -%}
{% endmacro %}


{% macro contract_checks() %}
    {#- Name to SQL condition, of the running model's contract. -#}
    {%- set checks = {} -%}
    {%- if (config.get('contract') or {}).enforced -%}
        {%- for constraint in model.constraints -%}
            {%- do checks.update(lakehouse_patterns.contract_check(constraint, none)) -%}
        {%- endfor -%}
        {%- for name, column in model.columns.items() -%}
            {%- for constraint in column.constraints -%}
                {%- do checks.update(lakehouse_patterns.contract_check(constraint, name)) -%}
            {%- endfor -%}
        {%- endfor -%}
    {%- endif -%}
    {{ return(checks) }}
{% endmacro %}


{% macro contract_check(constraint, column) %}
    {%- if constraint.type == 'check' -%}
        {{ return({constraint.name or 'check_' ~ local_md5(constraint.expression): constraint.expression}) }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        constraint.type == 'not_null',
        'Delta enforces constraints of type check and not_null, got ' ~ constraint.type ~ ' of ' ~ this
        ~ ': prove it with a test of dbt'
    ) -%}
    {%- set checks = {} -%}
    {%- for name in ([column] if column else constraint.columns) -%}
        {%- do checks.update({
            (constraint.name if column and constraint.name else 'not_null_' ~ local_md5(name)):
                lakehouse_patterns.quoted_name(name) ~ ' is not null'
        }) -%}
    {%- endfor -%}
    {{ return(checks) }}
{% endmacro %}
