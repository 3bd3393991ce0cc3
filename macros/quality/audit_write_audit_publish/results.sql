{#- Audit-Write-Audit-Publish: `<model>__audit_results`, what was measured of the published periods. -#}

{% macro _awap_results_columns() %}
    {#- `format_version` is raised whenever the columns change their meaning. -#}
    {{ return({
        'dataset': 'string',
        'run': 'string',
        'audit': 'string',
        'column_name': 'string',
        'issue': 'string',
        'value': 'double',
        'measured': 'double',
        'threshold': 'string',
        'outcome': 'string',
        'severity': 'string',
        'audited_at': 'timestamp',
        'format_version': 'int',
    }) }}
{% endmacro %}


{% macro _awap_results() %}
    {%- set definitions = [] -%}
    {%- for name, type in lakehouse_patterns._awap_results_columns().items() -%}
        {%- do definitions.append(name ~ ' ' ~ type) -%}
    {%- endfor -%}
    {{ return(lakehouse_patterns._awap_companion(
        '__audit_results', lakehouse_patterns._awap_results_columns(), definitions
    )) }}
{% endmacro %}


{% macro _awap_write_results(options, scope, findings) %}
    {#- A run that replaces the whole table of a model with periods forgets the periods before. -#}
    {%- set listed = findings.results | map(attribute='run') | unique | list + findings.deleted -%}
    {%- set replaced = 'true' if options.period and not scope.target
        else 'run in (' ~ lakehouse_patterns.text_literals(listed) ~ ')' if listed -%}
    {%- if findings.results -%}
        {%- call statement('write_results') -%}
            insert into {{ scope.results }}
            replace where {{ replaced }}
            {{ lakehouse_patterns._awap_results_sql(findings.results) }}
        {%- endcall -%}
    {%- elif replaced -%}
        {%- do run_query('delete from ' ~ scope.results ~ ' where ' ~ replaced) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_results_sql(results) %}
    {#- One row a period and audit. -#}
    {%- set names = ['run', 'audit', 'column_name', 'issue', 'value', 'measured', 'threshold', 'outcome', 'severity'] -%}
select
    {%- for name, type in lakehouse_patterns._awap_results_columns().items() %}
    {%- if name == 'dataset' %}
    {{ lakehouse_patterns.text_literal(this.schema ~ '.' ~ this.identifier) }} as dataset,
    {%- elif name == 'audited_at' %}
    timestamp '{{ run_started_at.strftime("%Y-%m-%d %H:%M:%S.%f") }}' as audited_at,
    {%- elif name == 'format_version' %}
    1 as format_version
    {%- else %}
    try_cast({{ name }} as {{ type }}) as {{ name }},
    {%- endif %}
    {%- endfor %}
from values
    {%- for result in results %}
    (
        {%- for name in names %}
        {{ 'null' if result[name] is none else lakehouse_patterns.text_literal(result[name]) }}{{ ',' if not loop.last }}
        {%- endfor %}
    ){{ ',' if not loop.last }}
    {%- endfor %}
    as result ({{ names | join(', ') }})
{%- endmacro %}


{% macro _awap_require_own_companions(options) %}
    {#-
        Before anything is staged. A table that has a companion's name by chance would lose its rows. Ours is known by its
        columns, also if it lies in the model's folder and the metastore doesn't know it.
    -#}
    {%- set own = {'__audit_results': lakehouse_patterns._awap_results_columns()} -%}
    {%- do own.update({'__rejects': lakehouse_patterns._awap_rejects_columns()}) if options.dispatches -%}
    {%- for suffix, columns in own.items() -%}
        {%- set relation = load_relation(lakehouse_patterns.relation_beside(this, suffix)) -%}
        {%- if relation is not none -%}
            {%- do lakehouse_patterns._awap_require_own(relation, columns) -%}
        {%- endif -%}
    {%- endfor -%}
{% endmacro %}


{% macro _awap_require_own(relation, columns) %}
    {#- A table without columns is one of rejects that a run created and didn't come to fill. -#}
    {%- set stored = lakehouse_patterns.column_types(relation) -%}
    {%- do lakehouse_patterns.require(
        not stored or not lakehouse_patterns.names_without_case(columns, stored),
        relation ~ ' exists and was not created by awap: rename or drop it'
    ) -%}
{% endmacro %}


{% macro _awap_companion(suffix, columns, definitions=[]) %}
    {#-
        A companion table of the model. No node declares it: if dbt's cache lacks it, it is created here, or registered
        again from its path after the metastore was lost; what lies there may not be ours.
    -#}
    {%- set relation = lakehouse_patterns.relation_beside(this, suffix) -%}
    {%- if load_relation(relation) is none -%}
        {%- do run_query(
            'create table if not exists ' ~ relation ~ (' (' ~ (definitions | join(', ')) ~ ')' if definitions else '')
            ~ ' using delta ' ~ lakehouse_patterns._awap_location(relation)
        ) -%}
        {%- do lakehouse_patterns._awap_require_own(relation, columns) -%}
    {%- endif -%}
    {{ return(relation) }}
{% endmacro %}


{% macro _awap_location(relation) %}
    {%- if config.get('location_root') -%}
location {{ lakehouse_patterns.text_literal(config.get('location_root') ~ '/' ~ relation.identifier) }}
    {%- endif -%}
{% endmacro %}
